"""The record of a step that is seen: its operators, its blocks of memory, the values that models read back.

Start reading at `recorder.Recorder`; `step_trace` is what comes out. Called by traces, ranks and scripts; it calls
operators.
"""
