"""What a run folder has recorded, for programs that read it: the public side of journal, weights and formats.

Metrics and events are read by `streamrl.observe.metrics.read_metrics` and `streamrl.observe.events.read_events`.
"""
