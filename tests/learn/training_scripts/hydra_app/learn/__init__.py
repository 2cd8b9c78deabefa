"""A package of the application."""
