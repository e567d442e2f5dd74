"""The ``regista`` command. Presentation only: every command calls the library."""
