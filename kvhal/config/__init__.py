"""Deployment files: layers, schema, and model geometry, up to a checked `Deployment`."""
