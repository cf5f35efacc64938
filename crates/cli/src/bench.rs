//! `kiln bench`: a fixed list of workloads, timed. docs/BENCHMARKS.md says how, and holds the results.
//!
//! A theme file holds a table of names and builders. A builder makes a benchmark's inputs and gives the call to time
//! ([`Workload`]); `measure.rs` times it, `bandwidth.rs` says what the machine's memory allows at the same size. Nothing
//! here knows how an operation is executed.

mod bandwidth;
mod measure;
mod memory;

mod elementwise;
mod overhead;
mod products;
mod remote;
mod rows;
mod train;

use bandwidth::Bandwidth;
use kiln::prelude::*;
use measure::{Times, measure};
use serde_json::json;
use std::collections::HashMap;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// One JSON object a benchmark.
    #[arg(long)]
    json: bool,
    /// Device to run on: cpu, cpu:1, reference.
    #[arg(long)]
    device: Option<String>,
    /// Threads that compute; all cores by default.
    #[arg(long)]
    threads: Option<usize>,
    /// Time spent measuring each benchmark.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Only benchmarks whose names contain one of these.
    #[arg(long, num_args = 0.., value_name = "SUBSTRING")]
    only: Vec<String>,
    /// Print the names and do nothing else.
    #[arg(long)]
    list: bool,
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let machine = Machine::at(args.device.as_deref());
    let names = || table(machine).map(|(name, ..)| *name).chain(remote::TABLE.iter().map(|(name, _)| *name));
    if let Some(none) = args.only.iter().find(|part| !names().any(|name| name.contains(part.as_str()))) {
        let known = names().collect::<Vec<_>>().join(", ");
        return Err(format!("no benchmark has `{none}` in its name; known are {known}").into());
    }
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|part| name.contains(part));
    let rows: Vec<&Row> = table(machine).filter(|(name, ..)| wanted(name)).collect();
    let served: Vec<&remote::Row> = remote::TABLE.iter().filter(|(name, _)| wanted(name)).collect();
    if args.list {
        rows.iter().for_each(|(name, ..)| println!("{name}"));
        served.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(threads) = args.threads {
        kiln::set_threads(threads);
    }
    let setup = Setup { device: crate::open(args.device.as_deref())?, machine, scale: 1 };
    let mut report = Report::new(args.json, machine);
    for &&(name, _, build) in &rows {
        report.line(name, time(build, &setup, args.seconds));
        setup.device.sync()?;
        setup.device.cleanup();
    }
    setup.device.flush()?;
    if !served.is_empty() {
        report.failed |= remote::run(&served, args.seconds, args.json)?;
    }
    Ok(if report.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A name, the machines it is for, and its builder.
type Row = (&'static str, On, Build);
type Build = fn(&Setup) -> Workload;

/// The machines that a benchmark is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    All,
    Host,
    Cuda,
}

/// What kind of device is measured: a few benchmarks are larger on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Machine {
    Host,
    Cuda,
}

impl Machine {
    /// The kind of the device at `address`, else of the default one.
    fn at(address: Option<&str>) -> Machine {
        let cuda = match address {
            Some(address) => address.starts_with("cuda"),
            None => Device::default().address().contains("cuda"),
        };
        if cuda { Machine::Cuda } else { Machine::Host }
    }
}

/// All benchmarks for a kind of device.
fn table(machine: Machine) -> impl Iterator<Item = &'static Row> {
    let themes = [overhead::TABLE, elementwise::TABLE, rows::TABLE, products::TABLE, train::TABLE];
    themes.into_iter().flatten().filter(move |(_, on, _)| match on {
        On::All => true,
        On::Host => machine == Machine::Host,
        On::Cuda => machine == Machine::Cuda,
    })
}

/// What a builder builds for.
struct Setup {
    device: Device,
    machine: Machine,
    /// Extents are divided by this: 1, or more to test the same program in a short time.
    scale: usize,
}

impl Setup {
    /// An extent at this scale.
    fn n(&self, extent: usize) -> usize {
        (extent / self.scale).max(1)
    }

    /// Standard normal numbers, kept for as long as the benchmark runs.
    fn randn(&self, shape: impl Into<Shape>) -> Tensor {
        self.randn_as(shape, DType::F32)
    }

    fn randn_as(&self, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        self.device.persistent(|| Tensor::randn_as(shape, dtype, &self.device))
    }

    /// Classes below `count`.
    fn classes(&self, count: usize, shape: impl Into<Shape>) -> Tensor {
        self.device.persistent(|| Tensor::randint(0, count as i64, shape, &self.device))
    }
}

/// A benchmark that is ready to run.
struct Workload {
    /// Bytes of the inputs, where the time is that of moving bytes.
    inputs: Option<usize>,
    /// Records one call and gives its results, which stay alive until the device is idle.
    call: Box<dyn FnMut() -> Vec<Tensor>>,
}

impl Workload {
    fn new(call: impl FnMut() -> Vec<Tensor> + 'static) -> Workload {
        Workload { inputs: None, call: Box::new(call) }
    }

    /// Work that is bound by reading these inputs and writing its results, each once.
    fn moving<const N: usize>(
        inputs: [Tensor; N],
        call: impl Fn(&[Tensor; N]) -> Vec<Tensor> + 'static,
    ) -> Workload {
        let bytes = inputs.iter().map(|t| t.meta().bytes()).sum();
        Workload { inputs: Some(bytes), call: Box::new(move || call(&inputs)) }
    }

    /// The work of something that moves far fewer bytes than it computes.
    fn computing(self) -> Workload {
        Workload { inputs: None, ..self }
    }
}

/// `f` of some leaves forward, and backward from a fixed gradient: its result, which has the first leaf's shape, and
/// the gradients of the leaves.
fn forward_backward<const N: usize>(
    setup: &Setup,
    leaves: [Tensor; N],
    f: impl Fn(&[Tensor; N]) -> Tensor + 'static,
) -> Workload {
    let leaves = leaves.map(Tensor::requires_grad);
    let gradient = setup.randn_as(leaves[0].shape(), leaves[0].dtype());
    let bytes = leaves.iter().chain([&gradient]).map(|t| t.meta().bytes()).sum();
    let call = move || {
        let y = f(&leaves);
        let gradients = y.backward_with(&gradient);
        let of = leaves.iter().filter_map(|leaf| gradients.get(leaf).cloned());
        [y.detach()].into_iter().chain(of).collect()
    };
    Workload { inputs: Some(bytes), call: Box::new(call) }
}

/// Builds and measures one benchmark. Whatever goes wrong is told in its place and leaves the others alone.
fn time(build: Build, setup: &Setup, seconds: f64) -> Result<Times, String> {
    let done = catch_unwind(AssertUnwindSafe(|| {
        kiln::seed(0);
        let mut work = build(setup);
        measure(&setup.device, &mut work, seconds).map_err(|e| e.to_string())
    }));
    done.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_string())
    })
}

/// Prints what was measured.
struct Report {
    json: bool,
    machine: Machine,
    /// What host memory allows, by size.
    host: HashMap<usize, Bandwidth>,
    failed: bool,
}

impl Report {
    fn new(json: bool, machine: Machine) -> Report {
        if !json {
            let head = ["median ms", "min ms", "first ms", "moved", "GB/s", "of copy"];
            print!("{:<32}", "benchmark");
            head.iter().for_each(|column| print!(" {column:>10}"));
            println!();
        }
        Report { json, machine, host: HashMap::new(), failed: false }
    }

    fn line(&mut self, name: &str, done: Result<Times, String>) {
        let times = match done {
            Ok(times) => times,
            Err(error) => {
                self.failed = true;
                match self.json {
                    true => println!("{}", json!({ "name": name, "peer": "kiln", "error": error })),
                    false => println!("{name:<32} {error}"),
                }
                return;
            }
        };
        let rate = times.bytes.map(|bytes| bytes as f64 / times.median / 1e6);
        let host = match (self.machine, times.bytes) {
            (Machine::Host, Some(bytes)) => {
                Some(*self.host.entry(bytes).or_insert_with(|| bandwidth::of(bytes)))
            }
            (Machine::Host, None) | (Machine::Cuda, _) => None,
        };
        if !self.json {
            let [first, rest @ ..] = [times.median, times.min, times.first];
            print!("{name:<32} {first:>10.4}");
            rest.iter().for_each(|ms| print!(" {ms:>10.4}"));
            if let (Some(rate), Some(host)) = (rate, host) {
                print!(" {:>10}", over_least(&times).map_or(String::new(), |times| format!("{times:.2}x")));
                print!(" {rate:>10.2} {:>9.0}%", rate / host.copy * 100.0);
            }
            println!();
            return;
        }
        let mut line = json!({
            "name": name, "peer": "kiln", "median_ms": rounded(times.median), "min_ms": rounded(times.min),
            "first_ms": rounded(times.first), "calls": times.calls,
        });
        if let (Some(bytes), Some(rate)) = (times.bytes, rate) {
            line["bytes"] = json!(bytes);
            line["gbs"] = json!(rounded(rate));
        }
        if let Some(moved) = times.moved {
            line["moved_bytes"] = json!(moved);
        }
        if let Some(grown) = times.grown {
            line["grown_bytes"] = json!(grown);
        }
        if let Some(host) = host {
            line["copy_gbs"] = json!(rounded(host.copy));
            line["read_gbs"] = json!(rounded(host.read));
        }
        println!("{line}");
    }
}

/// The bytes moved over the fewest that would do.
fn over_least(times: &Times) -> Option<f64> {
    Some(times.moved? as f64 / times.bytes? as f64)
}

/// To five decimals.
fn rounded(number: f64) -> f64 {
    (number * 1e5).round() / 1e5
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The results of the third call of a scaled-down benchmark: by then, training has changed its parameters twice.
    fn bits(build: Build, machine: Machine, device: Device) -> Vec<(kiln::Meta, Vec<u8>)> {
        kiln::seed(0);
        let mut work = build(&Setup { device, machine, scale: 32 });
        (work.call)();
        (work.call)();
        let results = (work.call)();
        assert!(!results.is_empty());
        let read = |t: &Tensor| t.to_data().map(|data| (data.meta, data.bytes.to_vec())).unwrap();
        results.iter().map(read).collect()
    }

    fn equals_the_reference(machine: Machine, theme: &[Row]) {
        for &(name, _, build) in theme {
            let (got, want) =
                (bits(build, machine, Device::cpu()), bits(build, machine, Device::reference()));
            assert!(got.iter().any(|(_, bytes)| bytes.iter().any(|&b| b != 0)), "{name}: all results are 0");
            assert!(got == want, "{name}: other bits than on the reference");
        }
    }

    macro_rules! themes {
        ($($theme:ident)*) => {$(
            #[test]
            fn $theme() {
                for machine in [Machine::Host, Machine::Cuda] {
                    equals_the_reference(machine, super::$theme::TABLE);
                }
            }
        )*};
    }
    themes!(overhead elementwise rows products train);

    #[test]
    fn names_are_told_apart_and_grouped() {
        for machine in [Machine::Host, Machine::Cuda] {
            let names: Vec<&str> = table(machine).map(|(name, ..)| *name).collect();
            assert!(names.iter().all(|name| name.split('/').count() == 2), "{names:?}");
            let mut sorted = names.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), names.len());
        }
    }

    #[test]
    fn a_failing_benchmark_is_told() {
        let setup = Setup { device: Device::cpu(), machine: Machine::Host, scale: 1 };
        let misused: Build = |s| {
            let (x, y) = (s.randn([2]), s.randn([3]));
            Workload::new(move || vec![&x + &y])
        };
        assert!(time(misused, &setup, 0.0).is_err_and(|e| e.contains("[2]")));
        let poisoned: Build = |s| {
            let (x, index) = (s.randn([2]), Tensor::from_slice(&[7i64], [1], &s.device));
            Workload::new(move || vec![x.index_select(0, &index)])
        };
        assert!(time(poisoned, &setup, 0.0).is_err());
    }
}
