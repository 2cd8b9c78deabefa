"""A training step as one rank runs it, alone or among others: DDP, FSDP, ZeRO, tensor, context, expert, pipeline.

Start reading at `training_step`; `featurize.trace.tracer` chooses a rank's class. Called by traces, real devices and
families; it calls recordings, operators and the timing of collectives.
"""
