"""Two releases, data folders or snapshots compared, configuration by configuration. Start reading at `farm.compare`."""
