"""The front process's link to the engine: streams, admission, control calls, choice of replica."""
