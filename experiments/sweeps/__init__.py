"""Many runs under one plan: grids, tuning, results at equal time."""
