"""Sample, grade, estimate. What a policy can do, on prompts it was not trained on."""
