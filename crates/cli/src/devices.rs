//! `kiln devices`: what can be computed on here.

use kiln::{DType, Device};
use std::error::Error;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// Servers whose devices to show instead: kiln://host:port, unix:/path, …
    urls: Vec<String>,
    /// One JSON object a device.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let devices = match args.urls.is_empty() {
        true => Device::list(),
        false => args.urls.iter().map(|url| Device::open(url)).collect::<Result<_, _>>()?,
    };
    for device in devices {
        let (info, memory) = (device.info(), device.memory());
        let dtypes: Vec<_> = DType::ALL.iter().map(|d| (d.name(), format!("{:?}", info.usage(*d)))).collect();
        if args.json {
            let dtypes: serde_json::Map<_, _> =
                dtypes.into_iter().map(|(d, u)| (d.into(), u.into())).collect();
            println!(
                "{}",
                serde_json::json!({
                    "address": device.address(), "id": device.id().0, "name": info.name, "count": info.count,
                    "threads": info.threads, "numerics": info.numerics, "dtypes": dtypes, "limit": memory.limit,
                })
            );
            continue;
        }
        println!(
            "{:<12} {} · {} threads · numerics {}",
            device.address(),
            info.name,
            info.threads,
            info.numerics
        );
        for (dtype, usage) in dtypes {
            println!("    {dtype:<5} {usage}");
        }
    }
    Ok(ExitCode::SUCCESS)
}
