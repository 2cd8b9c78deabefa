"""GPU models: data sheets, properties of architectures, and a machine's memory outside the allocator.

Start reading at `device_spec.DeviceSpec`. Called by all code that prices or places a step; it calls `conf` alone.
"""
