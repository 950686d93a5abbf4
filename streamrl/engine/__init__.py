"""SGLang: its HTTP client, starting and stopping a server, and what a CPU machine needs to run it."""
