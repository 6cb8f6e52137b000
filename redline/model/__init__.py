"""Plain GPT parts, slow by default. The model does not know that it is being optimised."""
