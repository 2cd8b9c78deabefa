"""Monitoring of a dispatcher: a log of events, metrics, health. Start reading at `service`."""
