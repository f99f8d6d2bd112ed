"""The Mixtral family: Mistral with experts in place of MLPs."""
