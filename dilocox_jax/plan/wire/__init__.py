"""What a message contains and how many bytes it has."""
