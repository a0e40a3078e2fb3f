"""What every floor uses: errors, units of measure, checked records, files. No torch."""
