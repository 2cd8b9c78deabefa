"""Writes files atomically, reads them within limits, and computes identities of their content.

Start reading at `outputs`. Called by all rooms; it calls no other folder.
"""
