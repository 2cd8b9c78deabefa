"""GPU models: data sheets, what follows from an architecture, and memory that a machine takes outside the allocator.

Start reading at `device_spec.DeviceSpec`. Called by all that prices or places a step; it calls `conf` alone.
"""
