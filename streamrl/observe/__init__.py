"""What a run says about itself: events, metrics, console, sinks, pictures."""
