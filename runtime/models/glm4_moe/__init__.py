"""The GLM-4.5 family: GLM-4.5, 4.6 and 4.7, and GLM-4.7-Flash, which has attention over latents."""
