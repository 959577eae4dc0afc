"""Pictures and records of plans and traces, for people. matplotlib, no torch, no process group."""
