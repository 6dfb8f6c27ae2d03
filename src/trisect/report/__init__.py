"""Reports: what a run did, for people."""
