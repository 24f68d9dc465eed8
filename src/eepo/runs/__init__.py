"""Run folders: records, checkpoints, progress bars, alarms and loggers."""
