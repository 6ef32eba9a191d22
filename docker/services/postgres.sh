#!/bin/sh
# Creates a cluster with the user, the database and the password of POSTGRES_USER, POSTGRES_DB and
# POSTGRES_PASSWORD_FILE, as the entry point of PostgreSQL's image does, and runs the server.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
	initdb --username "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" --auth-host scram-sha-256 --auth-local peer \
		--encoding UTF8 --pgdata "$PGDATA"
	echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
	echo "CREATE DATABASE \"$POSTGRES_DB\";" | postgres --single -j -D "$PGDATA" template1
fi
exec postgres -D "$PGDATA" -c listen_addresses='*' -c unix_socket_directories=/tmp "$@"
