//! The output directory of a conversion.
//!
//! Takes a place for the output, the names, dtypes and shapes of its tensors, their bytes as they are made,
//! the source's directory and its `config.json`. Gives a directory that is complete or not there: it is
//! written as `NAME.partial` ([`Staging`]), its tensors go to shards at positions known from the start
//! ([`ShardPlan`], [`ShardWriter`]), its configuration says what exllamav2 reads ([`exl2_config`]), the other
//! files of the source follow byte for byte ([`copy_side_files`]). What a job needs to go on after a kill
//! stands in the partial directory too: what it is ([`Identity`] and whatever the caller adds), and a
//! [`Journal`] of what is done.
//!
//! Must not know what a tensor means, where it came from or how it was made: nothing here reads a checkpoint
//! or decides on a layout. The same tensors and limit give the same bytes, in whatever order and from however
//! many threads they are written.

mod config;
mod error;
mod identity;
mod journal;
mod publish;
mod rope;
mod shard_hash;
mod shard_plan;
mod shard_writer;
mod side_files;
mod space;
mod staging;

pub use config::{
    Config, ConfigNote, EXLLAMAV2_VERSION, Exl2Facts, config_json, dense_config, exl2_config, gptq_config,
};
pub use error::{Action, Error};
pub use identity::{Difference, Identity, REPORT_FILE, TOOL};
pub use journal::Journal;
pub use shard_plan::{PlannedShard, ShardPlan, TensorSpec};
pub use shard_writer::{INDEX_FILE, ShardFile, ShardWriter};
pub use side_files::{SideFiles, SkipReason, Skipped, check_side_files, copy_side_files, side_file_bytes};
pub use space::check_space;
pub use staging::{Leftover, Staging, check_apart, is_resumable, partial_of, rejected_of};
