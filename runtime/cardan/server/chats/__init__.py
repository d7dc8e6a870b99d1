"""What every API of chats shares: a conversation in, an answer taken apart out."""
