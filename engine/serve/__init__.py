"""The inference engine: model, scheduler, restore and the HTTP server."""
