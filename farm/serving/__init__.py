"""Estimates over HTTP: the application, its limits, and the pool that traces. Start reading at `application`."""
