"""The client of environment servers: sessions on one server or several, with async and without."""
