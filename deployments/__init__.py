"""Everything distributed: device actors, transports, scheduler, Serve deployments, HTTP API, command line."""
