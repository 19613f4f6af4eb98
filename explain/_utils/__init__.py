"""What every room uses: errors, spelling, containers, signals, method specs, the version."""
