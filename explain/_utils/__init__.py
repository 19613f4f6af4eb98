"""What every subpackage uses: errors, spelling, containers, signals, method specs, the version."""
