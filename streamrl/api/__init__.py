"""streamrl from Python: `streamrl.train` starts a run and returns a handle to it. The command line is a user of it."""
