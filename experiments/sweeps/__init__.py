"""Many runs from one config: which, where they run, and what they found."""
