"""What `prophet doctor` looks at, on one rank and on all of them; `prophet.commands.doctor` prints it."""
