"""Real text, real models and the jobs that make the project's tables; not part of the installed library."""
