"""Samples, grades and estimates: measures a policy on prompts that it was not trained on."""
