"""Models with what conversion finds hard, small and whole, by family; `models_hard.json` lists them with their inputs."""
