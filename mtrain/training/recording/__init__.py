"""What a run tells about itself while it trains: events, records of its steps, and where they go."""
