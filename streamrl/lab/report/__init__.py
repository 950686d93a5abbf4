"""`streamrl report`: one or several runs as one HTML page that needs nothing but itself."""
