"""Commands and what stands on the library; they need more than torch and diffusers."""
