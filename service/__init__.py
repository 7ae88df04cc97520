"""The teacher behind HTTP: an API process that stores and serves, and a worker process that scores."""
