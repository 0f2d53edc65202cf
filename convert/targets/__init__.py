"""Writers of other toolkits' checkpoints."""
