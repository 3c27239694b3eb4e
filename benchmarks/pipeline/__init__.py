"""What moving layers between pipeline stages gains while a dynamic model trains."""
