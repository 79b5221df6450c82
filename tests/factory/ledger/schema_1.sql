BEGIN TRANSACTION;
CREATE TABLE agent_runs (
	id INTEGER NOT NULL,
	agent TEXT NOT NULL,
	asked TEXT NOT NULL,
	base_commit TEXT NOT NULL,
	profile BIGINT NOT NULL,
	state TEXT NOT NULL,
	proposal BIGINT,
	why TEXT,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE anomalies (
	id INTEGER NOT NULL,
	segment BIGINT NOT NULL,
	step BIGINT NOT NULL,
	kind TEXT NOT NULL,
	detail JSON,
	PRIMARY KEY (id),
	FOREIGN KEY(segment) REFERENCES segments (id)
);
CREATE TABLE candidates (
	id INTEGER NOT NULL,
	segment BIGINT NOT NULL,
	checkpoint TEXT NOT NULL,
	export_path TEXT NOT NULL,
	export_sha256 TEXT NOT NULL,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (id),
	UNIQUE (segment),
	FOREIGN KEY(segment) REFERENCES segments (id)
);
CREATE TABLE checkpoints (
	id TEXT NOT NULL,
	segment BIGINT NOT NULL,
	step BIGINT NOT NULL,
	path TEXT NOT NULL,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (id),
	FOREIGN KEY(segment) REFERENCES segments (id)
);
CREATE TABLE data_plans (
	id TEXT NOT NULL,
	"plan" JSON NOT NULL,
	created_at FLOAT,
	PRIMARY KEY (id)
);
INSERT INTO "data_plans" VALUES('p1','{"token_shards": [], "seed": 1}',1.0);
CREATE TABLE documents (
	"key" TEXT NOT NULL,
	id TEXT NOT NULL,
	shard TEXT NOT NULL,
	"row" BIGINT NOT NULL,
	domain TEXT NOT NULL,
	source TEXT,
	license TEXT,
	content_sha256 TEXT,
	fate TEXT NOT NULL,
	rule TEXT,
	matched TEXT,
	detail TEXT,
	releasable BOOLEAN NOT NULL,
	tokens BIGINT NOT NULL,
	supervised_tokens BIGINT NOT NULL,
	token_shard TEXT,
	PRIMARY KEY ("key"),
	FOREIGN KEY(shard) REFERENCES shards (sha256)
);
CREATE TABLE eval_items (
	evaluation BIGINT NOT NULL,
	task TEXT NOT NULL,
	item TEXT NOT NULL,
	domain TEXT NOT NULL,
	cluster TEXT NOT NULL,
	value FLOAT NOT NULL,
	weight FLOAT NOT NULL,
	FOREIGN KEY(evaluation) REFERENCES evaluations (id)
);
CREATE TABLE evaluations (
	id INTEGER NOT NULL,
	candidate BIGINT NOT NULL,
	suite_sha256 TEXT NOT NULL,
	summary JSON NOT NULL,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (id),
	UNIQUE (candidate, suite_sha256),
	FOREIGN KEY(candidate) REFERENCES candidates (id)
);
CREATE TABLE events (
	id INTEGER NOT NULL,
	at FLOAT NOT NULL,
	kind TEXT NOT NULL,
	subject TEXT NOT NULL,
	detail JSON,
	PRIMARY KEY (id)
);
INSERT INTO "events" VALUES(1,2.0,'segment_done','segment:1','{"loss": 3.5}');
CREATE TABLE exchanges (
	id INTEGER NOT NULL,
	at FLOAT NOT NULL,
	run BIGINT NOT NULL,
	label TEXT NOT NULL,
	state TEXT NOT NULL,
	tokens BIGINT NOT NULL,
	usd FLOAT NOT NULL,
	file TEXT,
	trace TEXT,
	PRIMARY KEY (id)
);
CREATE TABLE held_out (
	"key" TEXT NOT NULL,
	domain TEXT NOT NULL,
	source TEXT NOT NULL,
	content JSON NOT NULL,
	PRIMARY KEY ("key"),
	FOREIGN KEY("key") REFERENCES documents ("key")
);
CREATE TABLE meta (
	"key" TEXT NOT NULL,
	value TEXT,
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema','1');
CREATE TABLE near_dup_bands (
	band INTEGER NOT NULL,
	hash BIGINT NOT NULL,
	document TEXT NOT NULL
);
CREATE TABLE near_dup_signatures (
	document TEXT NOT NULL,
	signature BLOB NOT NULL,
	PRIMARY KEY (document)
);
CREATE TABLE ngrams (
	hash BIGINT NOT NULL,
	document TEXT NOT NULL,
	held_out BOOLEAN NOT NULL
);
CREATE TABLE profiles (
	id INTEGER NOT NULL,
	code_commit TEXT NOT NULL,
	path TEXT NOT NULL,
	summary JSON NOT NULL,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE proposals (
	number BIGINT NOT NULL,
	agent TEXT NOT NULL,
	target TEXT NOT NULL,
	title TEXT NOT NULL,
	hypothesis TEXT NOT NULL,
	predicted_gain FLOAT,
	base_commit TEXT NOT NULL,
	branch TEXT NOT NULL,
	"commit" TEXT,
	patch_sha256 TEXT,
	state TEXT NOT NULL,
	verdict BIGINT,
	report TEXT,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (number),
	FOREIGN KEY(verdict) REFERENCES verdicts (id)
);
CREATE TABLE releases (
	number BIGINT NOT NULL,
	candidate BIGINT NOT NULL,
	verdict BIGINT NOT NULL,
	state TEXT NOT NULL,
	mlflow_version TEXT,
	report TEXT,
	approved_by TEXT,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (number),
	UNIQUE (candidate),
	FOREIGN KEY(candidate) REFERENCES candidates (id),
	FOREIGN KEY(verdict) REFERENCES verdicts (id)
);
CREATE TABLE segments (
	id INTEGER NOT NULL,
	kind TEXT NOT NULL,
	parent BIGINT,
	generation BIGINT NOT NULL,
	recipe TEXT NOT NULL,
	recipe_json JSON NOT NULL,
	recipe_sha256 TEXT NOT NULL,
	data_plan TEXT NOT NULL,
	code_commit TEXT NOT NULL,
	first_step BIGINT NOT NULL,
	last_step BIGINT NOT NULL,
	state TEXT NOT NULL,
	attempts BIGINT NOT NULL,
	folder TEXT NOT NULL,
	result JSON,
	created_at FLOAT NOT NULL,
	finished_at FLOAT,
	PRIMARY KEY (id),
	FOREIGN KEY(data_plan) REFERENCES data_plans (id)
);
INSERT INTO "segments" VALUES(1,'trunk',NULL,1,'tiny','{"name": "tiny", "precision": "fp32"}','r1','p1','c1',0,20,'done',0,'segments/00001-trunk','{"loss": 3.5}',1.0,2.0);
CREATE TABLE shards (
	sha256 TEXT NOT NULL,
	name TEXT NOT NULL,
	path TEXT NOT NULL,
	bytes BIGINT NOT NULL,
	state TEXT NOT NULL,
	reason TEXT,
	rows BIGINT NOT NULL,
	counts JSON,
	domains JSON,
	tokens BIGINT NOT NULL,
	ingested_at FLOAT NOT NULL,
	PRIMARY KEY (sha256)
);
CREATE TABLE token_shards (
	id TEXT NOT NULL,
	shard TEXT NOT NULL,
	path TEXT NOT NULL,
	tokenizer TEXT NOT NULL,
	documents BIGINT NOT NULL,
	tokens BIGINT NOT NULL,
	domains JSON NOT NULL,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (id),
	FOREIGN KEY(shard) REFERENCES shards (sha256)
);
CREATE TABLE tokenizers (
	sha256 TEXT NOT NULL,
	path TEXT NOT NULL,
	vocab_size BIGINT NOT NULL,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (sha256)
);
CREATE TABLE tracked_runs (
	subject TEXT NOT NULL,
	run_id TEXT NOT NULL,
	PRIMARY KEY (subject)
);
CREATE TABLE verdicts (
	id INTEGER NOT NULL,
	gate TEXT NOT NULL,
	subject TEXT NOT NULL,
	against TEXT,
	policy_sha256 TEXT NOT NULL,
	subject_sha256 TEXT NOT NULL,
	outcome TEXT NOT NULL,
	reasons JSON NOT NULL,
	evidence JSON NOT NULL,
	created_at FLOAT NOT NULL,
	PRIMARY KEY (id)
);
CREATE INDEX near_dup_by_hash ON near_dup_bands (hash, band);
CREATE INDEX ix_ngrams_hash ON ngrams (hash);
CREATE INDEX held_out_ngrams ON ngrams (document) WHERE held_out;
CREATE INDEX ix_exchanges_run ON exchanges (run);
CREATE INDEX ix_exchanges_at ON exchanges (at);
CREATE INDEX ix_documents_content_sha256 ON documents (content_sha256);
CREATE INDEX ix_documents_id ON documents (id);
CREATE INDEX ix_documents_shard ON documents (shard);
CREATE INDEX ix_eval_items_evaluation ON eval_items (evaluation);
COMMIT;
