"""The dispatcher seen from outside: a log of events, metrics, health. Start reading at `service`."""
