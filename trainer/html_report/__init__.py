"""One page that says what a run is, and how private: from its public files alone."""
