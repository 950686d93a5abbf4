"""What a launch will use, worked out from the configuration and the model's shape alone; nothing is started."""
