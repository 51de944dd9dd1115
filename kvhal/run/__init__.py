"""The main job: the flow from deployment to release, and the checks it makes on a live cache."""
