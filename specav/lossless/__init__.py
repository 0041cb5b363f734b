"""The losslessness laboratory: prove a policy exact, or show the leak."""
