"""What all engines have, under the names of the API pages."""
