"""What a run needs and how fast it will be, before it starts: `optimus plan`."""
