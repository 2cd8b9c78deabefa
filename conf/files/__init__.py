"""Files that this project writes and reads: atomically, within limits, with the identity of what they hold.

Start reading at `outputs`. Called by all rooms; it calls no other folder.
"""
