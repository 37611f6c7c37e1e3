"""Text-to-image diffusion: noise schedules, pipelines in folders, sampling."""
